"""What fits where, and how fast it could be: arithmetic from shapes and datasheets, no device."""
