"""What `headrace COMMAND` does, a file a command; `runtime/cli.py` reads their options."""
