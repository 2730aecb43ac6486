"""What the router's answers have turned out to be worth."""
