"""GloVe (Pennington et al. 2014): least squares on co-occurrence counts."""
