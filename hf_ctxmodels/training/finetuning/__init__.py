"""Ways to fine-tune: what is trained when, what the weights are held to, and what is drawn anew."""
