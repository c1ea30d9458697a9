"""The host side that families share: checks, devices, tile configurations, the cache of calls."""
