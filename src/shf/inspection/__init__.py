"""What a user's model and loss do with the rows of a batch, found by running them; and what must be refused."""
