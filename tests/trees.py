"""What tests ask of a draft tree's nodes."""


def ranks_of(tree):
    """Ranks from the root of each node, where a token's id is its rank."""
    parents, tokens = tree.parents.tolist(), tree.token_ids.tolist()
    ranks = [()]
    for node in range(1, len(parents)):
        ranks.append((*ranks[parents[node]], tokens[node]))
    return ranks[1:]


def path_to(tree, node):
    """Nodes from the root to `node`, the root left out."""
    parents, path = tree.parents.tolist(), []
    while node > 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
