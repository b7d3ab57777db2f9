"""One module per command or small group; loaded only when its command is invoked."""
