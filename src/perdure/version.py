"""The version of the package, recorded on every execution that it starts."""

VERSION = "0.1.0"
