from tests.support.servers.served import demo_served, fake_served

__all__ = ["demo_served", "fake_served"]
