"""Page *Retention*."""
