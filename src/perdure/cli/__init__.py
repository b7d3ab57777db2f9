"""The command line, a thin layer over the client: look at a store, run workers, act."""
