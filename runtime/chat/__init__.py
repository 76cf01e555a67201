"""From messages to a prompt, and from an answer to the calls of tools in it."""
