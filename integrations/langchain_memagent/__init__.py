"""MemAgent in LangChain agents, graphs and chains."""
