"""Page *Segments*."""
