"""Reports the cache's contents to routers."""
