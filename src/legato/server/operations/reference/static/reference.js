/** Has Swagger UI show the API of the server that the page came from, and ask nobody else. */

globalThis.SwaggerUIBundle({
  url: new URL("openapi.json", document.baseURI).href,
  dom_id: "#reference",
  deepLinking: true,
  validatorUrl: null,
});
