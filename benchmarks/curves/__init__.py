"""The growth of costs. Each module measures one thing at growing sizes on a store of its own."""
