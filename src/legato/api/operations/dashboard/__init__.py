"""The live dashboard: a page, and the records that it draws."""
