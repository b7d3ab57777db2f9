"""Measurements: perdure beside its peers, growth curves, and the floors of the machine."""
