"""Moves work between a store and the code: dispatchers, locks, activities."""
