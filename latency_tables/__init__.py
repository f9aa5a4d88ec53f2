"""Latency tables that come with dreams-nas, JSON in a folder per device."""
