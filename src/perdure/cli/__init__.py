"""The command line: looks at a store, runs workers, acts on instances. Thin over the client."""
