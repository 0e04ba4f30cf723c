"""How KV is moved and corrected: rotation, references and correction policies. Pure torch, no engine."""
