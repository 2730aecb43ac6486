"""What a trainer has learned and not published, kept over a restart."""
