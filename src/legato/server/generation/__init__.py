"""One HTTP request's generation, in whichever format it was asked for."""
