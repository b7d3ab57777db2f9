"""Each module holds a group of commands; it is imported when one of them is invoked."""
