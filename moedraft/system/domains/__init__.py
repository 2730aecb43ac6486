"""What is registered, what could be, and what the router and the records learn of it."""
