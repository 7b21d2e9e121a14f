"""From records to figures, tables and plots."""
