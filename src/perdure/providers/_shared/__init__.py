"""Pure rules and small mechanisms that more than one provider needs."""
