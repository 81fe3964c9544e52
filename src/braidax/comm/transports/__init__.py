"""Transports: what moves messages between ranks."""
