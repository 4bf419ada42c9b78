// Paper is white: a page is printed in the light theme, whatever the screen shows.
"use strict";

(() => {
  const page = document.documentElement.dataset;
  let onScreen;
  matchMedia("print").addEventListener("change", ({matches}) => {
    if (matches) [onScreen, page.theme] = [page.theme, "light"];
    else page.theme = onScreen;
  });
})();
