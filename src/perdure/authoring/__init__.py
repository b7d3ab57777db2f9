"""What an author of orchestrations and activities touches."""
