"""What every request goes through, whatever it asks for."""
