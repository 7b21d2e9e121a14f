"""What is cached, told to others."""
