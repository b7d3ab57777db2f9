"""Durable async functions for Python."""
