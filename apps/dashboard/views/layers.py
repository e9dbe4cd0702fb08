"""Page *Layers*."""
