"""Starting, watching and administrating instances from outside."""
