"""What one chip computes, and how arrays are laid out over chips."""
