"""How many tokens to draft: how many would be accepted, what a round costs, and what follows from both."""
