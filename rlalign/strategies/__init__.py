"""Lightning strategies with what the methods need."""
