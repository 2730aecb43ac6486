"""A trainer that has nothing but the home in common with the server: letters in a folder, not a pipe."""
