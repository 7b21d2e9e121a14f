"""Pictures of how a request goes, drawn by code; they follow the reader's light or dark theme."""
