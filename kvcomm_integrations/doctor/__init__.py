"""``kvcomm doctor``: says what keeps this machine or this model from reusing KV, and what to do about it."""
