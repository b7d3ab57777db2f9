"""The parts of the state machine that drives a provider and the model side by side."""
