"""How long steps take: measured, judged, kept on disk, and measured again in quiet times."""
