"""Rollout engines, embedded or served: pool, load balancer, client and colocation."""
