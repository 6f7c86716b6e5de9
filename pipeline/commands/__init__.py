"""What a person starts: the commands and what each of them does."""
