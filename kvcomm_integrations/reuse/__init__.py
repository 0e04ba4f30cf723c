"""How KV is moved and corrected: rotation, references, correction policies and the gate. Pure torch, no engine."""
