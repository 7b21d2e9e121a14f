"""What clients ask for: bodies read strictly and within bounds, and prompts made of them."""
