"""What this machine is and may use, and what it can really execute."""
