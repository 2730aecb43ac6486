"""Compare the arms: whoever may draft for a row, by what each would have guessed."""
