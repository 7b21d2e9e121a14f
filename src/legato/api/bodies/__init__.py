"""Fields that the bodies of several endpoints share, strictly parsed and within bounds."""
