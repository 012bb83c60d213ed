"use strict";

// Starts Swagger UI. A file of its own, because the page's policy allows no script within the page.
(function () {
  const place = document.getElementById("swagger-ui");
  const csrfCookie = place.dataset.csrfCookie + "=";

  function csrfToken() {
    const found = document.cookie.split("; ").find((pair) => pair.startsWith(csrfCookie));
    return found === undefined ? "" : decodeURIComponent(found.slice(csrfCookie.length));
  }

  SwaggerUIBundle({
    url: place.dataset.schema,
    domNode: place,
    deepLinking: true,
    docExpansion: "list",
    // Without this, Swagger UI asks another host for a badge.
    validatorUrl: null,
    requestInterceptor(request) {
      if (request.method !== "GET" && csrfToken()) {
        request.headers["X-CSRFToken"] = csrfToken();
      }
      return request;
    },
  });
})();
