"""Learned corrections in files: for warm starts, and to share between replicas what each has learned."""
