"""The parts that authors of orchestrations and activities use; ``perdure`` exports the names."""
